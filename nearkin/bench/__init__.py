"""Fair benchmarks: what papers published, how entrants rank, and which differences are settled.

    papers.py       the tables of four papers as data, each value with its source and what is known against it
    results.py      one result, many results as a table, reading them from CSV and JSON
    tournament.py   ranks, medals and the tests that say which differences are settled
    statistics.py   the tests themselves
    verdict.py      a tournament in plain English
    tables.py       a tournament for the terminal, Markdown, LaTeX and CSV
    diagram.py      the critical-difference diagram
    tune.py         each loss's settings searched on validation classes, with an equal budget
    space.py        what is searched: declared ranges and learning rates
    coordinate.py   the thesis's search, one setting at a time on its grids
    sharing.py      what workers share: Optuna's storage, and claims that end with their process
    launch.py       workers: processes of this machine, or jobs of a cluster

Importing this package costs nothing; its modules bring what they need.
"""
