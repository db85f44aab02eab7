"""``gym-capture-redis bench``: measures this package beside its peers, and every goal it set itself.

The way of a run, from the top: ``command.py`` takes the options, ``run.py`` makes the servers and the
records, ``measures/`` has one module for each section, ``peers/`` one for each contender, and ``report.py``,
``document.py`` and ``plots.py`` show what was found. What the figures are held against is in ``goals.py``.
"""
