"""``python -m gym_capture_redis.cli`` is the ``gym-capture-redis`` command."""

from gym_capture_redis.cli import main

# Worker processes import the main module again, under another name.
if __name__ == "__main__":
    main()
