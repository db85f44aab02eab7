"""The contenders, one module each; ``peer.py`` says what a contender does, ``lineup.py`` who takes part."""
