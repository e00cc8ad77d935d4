//! Pools that are full, small or hold versions for old snapshots.
