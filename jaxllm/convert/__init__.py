"""Parameters to and from the formats of other projects."""
