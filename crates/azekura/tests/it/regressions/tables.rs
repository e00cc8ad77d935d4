//! Tables, blob files, compaction and iteration.
