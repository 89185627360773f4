"""Members on a worker: leased, run behind the gate, checked, reported, parked."""
