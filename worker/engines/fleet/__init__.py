"""Several engines behind one face: who they are, in which state, and which takes a call."""
