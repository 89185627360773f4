"""The rollout worker: leases members, runs their trajectories, judges full groups."""
