"""Which of a vendor's calls serves each contraction: the heuristic's choice, or the one measured fastest here
(choose.py)."""
