"""A package, so that its engines are stopped after its last test (pytest scope "package")."""
