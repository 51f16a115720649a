"""Version of the package, where every room can read it."""

VERSION = "0.1.0"
