//! Recovery from damaged logs, in every recovery mode.
