"""Which store a command talks to, the one that every project has, and what is kept in it."""
