"""Being here puts this folder on the import path: the toy vendor is imported as `toy`, as a package of its own."""
