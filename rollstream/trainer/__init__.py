"""Behind `GroupStream`: what a trainer holds of a run, how it waits, and how it keeps its claim."""
