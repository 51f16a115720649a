"""Checkpoints: the format, the writer, the reader, and the state of a stepper in one."""
