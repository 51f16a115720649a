"""Folders and files at addresses (`s3://bucket/run`): every one has a copy on this machine, which is what others use.

address.py    address <-> path of its copy; pure
store.py      the files of one address through fsspec, each moved whole and verified
file_copy.py  a file or a folder of data, brought here when it is needed; a file of ours, sent there
run_copy.py   the copy of a run: brought up to date when it is opened, sent as training goes
uploader.py   a thread that sends it
"""
