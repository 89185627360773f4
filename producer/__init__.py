"""The producer: reads prompts, holds back at capacity, scans from the frontier."""
