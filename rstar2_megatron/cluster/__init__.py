"""The only room that imports rlinf: cluster, placement, CPU slots, worker groups, channels."""
