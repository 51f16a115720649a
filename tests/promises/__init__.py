"""Promises of the whole program, which no single source file keeps: same answers, old runs, crashes, clouds, pairs."""
