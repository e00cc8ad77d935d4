//! Paths, working directories, locks, checkpoint targets.
