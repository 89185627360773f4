"""Everything that can happen to a run, one method an act; a module a role."""
