"""Fair benchmarks: many trainings under one protocol, how methods rank, and which differences are settled.

    study.py        what is compared, on what, how often: a TOML file and the trials it means
    protocols.py    what chooses the epoch and what is judged; the badge of every number
    presets.py      studies by name
    estimates.py    time and disk of a study, before it runs
    running.py      the folder of a study; a worker takes trials from it, and nothing is lost or done twice
    workers.py      several workers, watched: `nearkin bench run`
    machine.py      what each of several workers gets of this machine
    repeats.py      mean, deviation and intervals over seeds and folds; differences paired by query
    overview.py     a study as tables and sentences
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
