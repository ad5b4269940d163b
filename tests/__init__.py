"""The tests mirror octavo/ folder by folder: octavo/foo/bar.py is tested by tests/foo/test_bar.py.
They may import everything; fakes/ holds the small stand-ins that several of them use.
Run by `python -m pytest`."""
