"""A program for each finding code that causes it (``mem001_bad.py``), and its repaired twin (``mem001_fixed.py``).

Each stands alone and runs as it is: ``python -m instrumentation.catalogue_programs.mem001_bad``. For people who look
for the cause of a finding; nothing imports them. ``instrumentation.catalogue_source`` reads and runs them.
"""
