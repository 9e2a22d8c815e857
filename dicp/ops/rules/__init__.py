"""The rows of the op table, grouped by how their ops behave."""
