"""Chaos campaigns: attacks on whole runs, as programs with a seed and a count. See docs/reliability.md.

python -m tools.chaos kills inputs --seed 3 --count 200 --jobs 2
"""
