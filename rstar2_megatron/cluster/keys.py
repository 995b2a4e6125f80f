"""Names on the rollout channel. One RLinf channel carries all three streams, each under its own key."""

PROBLEMS = "problems"  # driver -> rollout workers: Problem, then one None per worker
GROUPS = "groups"  # rollout workers -> reward workers: finished Group, then one None per reward worker
GRADED = "graded"  # reward workers -> driver: graded Group
