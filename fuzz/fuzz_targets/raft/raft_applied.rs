//! Any bytes as what a state machine applied last.
//! The decoder returns an error or a value, and never panics.
#![no_main]

use azekura_raft::testing::{FuzzDecoder, decode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| drop(decode(FuzzDecoder::Applied, bytes)));
