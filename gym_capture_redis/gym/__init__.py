"""What only NeMo Gym uses; importing any of it needs ``nemo_gym``."""
