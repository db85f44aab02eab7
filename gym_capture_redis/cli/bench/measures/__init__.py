"""The sections of the benchmark, one module each: ``measure(bench)`` gives what it found."""
