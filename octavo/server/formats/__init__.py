"""What models write beside plain text: reasoning, and calls of tools.

A format is a table of marks, a row of a JSON file here: a file for each way to write calls. The parser of streams, the
reader of calls and their grammar are made of that one table.
"""
