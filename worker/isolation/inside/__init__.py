"""What runs inside the sandbox, beside the program: texts that are copied into its folder.

Each is a script for `python -I`, with the standard library alone; none imports the rest of this
package, which a program's user may not even be able to read.
"""
