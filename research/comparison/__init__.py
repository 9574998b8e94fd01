"""The comparison of controllers: what is run, how it is kept, and what follows from it."""
