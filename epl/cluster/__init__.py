"""What a job runs on: ranks, nodes and devices as facts, process groups, and how ranks talk."""
