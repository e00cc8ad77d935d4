//! The integration tests, in one binary.

mod fs_contract;
