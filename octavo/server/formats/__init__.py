"""What models write beside plain text: reasoning, and calls of tools.

A format is a table of marks, a JSON file here. The parser of streams, the reader of calls and their grammar are made of
that one table.
"""
