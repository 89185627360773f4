"""`rollstream top`: what a run does now, and what holds it up."""
