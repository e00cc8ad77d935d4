//! Any bytes give a value or an error: the committed corpus is replayed and mutated for a while. The same decoders are
//! targets of `fuzz/`.
//!
//! - `AZEKURA_FUZZ_SECONDS`: how long to mutate, over all decoders; 2 by default.
//! - `AZEKURA_SEED`: which mutations; 1 by default.

use azekura::testing::SeededRng;
use azekura_raft::testing::{FuzzDecoder, decode};
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

/// Every decoder under the name of its fuzz target and of its folder in the corpus.
const FUZZ_TARGETS: &[(&str, FuzzDecoder)] = &[
    ("raft_applied", FuzzDecoder::Applied),
    ("raft_entry", FuzzDecoder::Entry),
    ("raft_snapshot_frame", FuzzDecoder::SnapshotFrame),
    ("raft_snapshot_position", FuzzDecoder::SnapshotPosition),
    ("raft_vote", FuzzDecoder::Vote),
];

/// Inputs named `good-…` decode, and inputs named `bad-…` give an error.
#[test]
fn corpus_inputs_give_expected_results() {
    for (name, decoder) in FUZZ_TARGETS {
        let inputs = corpus_inputs(name);
        for kind in ["good-", "bad-"] {
            assert!(inputs.iter().any(|(input, _)| input.starts_with(kind)), "{name}: no input {kind}");
        }
        for (input, bytes) in inputs {
            let outcome = run_target(*decoder, &bytes);
            assert_eq!(outcome, input.starts_with("good-"), "{name}/{input}");
        }
    }
}

#[test]
fn mutated_inputs_are_harmless() {
    let variable = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let (seconds, seed) = (variable("AZEKURA_FUZZ_SECONDS", 2), variable("AZEKURA_SEED", 1));
    let share = Duration::from_millis(seconds * 1000 / FUZZ_TARGETS.len() as u64);
    for (i, (name, decoder)) in FUZZ_TARGETS.iter().enumerate() {
        let inputs = corpus_inputs(name);
        let (mut rng, start, mut count) = (SeededRng::with_stream(seed, i as u64), Instant::now(), 0u64);
        while count < 1000 || start.elapsed() < share {
            let input = mutate(&inputs, &mut rng);
            let outcome = std::panic::catch_unwind(|| run_target(*decoder, &input));
            assert!(outcome.is_ok(), "AZEKURA_SEED={seed}, {name}: {input:?}");
            count += 1;
        }
        println!("{name:<24} {count:>9} inputs from {} of the corpus", inputs.len());
    }
}

/// Whether an input decodes. Panics if the error is of another kind than that of damaged bytes.
fn run_target(decoder: FuzzDecoder, input: &[u8]) -> bool {
    match decode(decoder, input) {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
            false
        }
    }
}

/// Inputs under `testdata/corpus/NAME`, by name.
fn corpus_inputs(name: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/corpus").join(name);
    let entries = std::fs::read_dir(&folder).expect("the corpus can be read").map(Result::unwrap);
    let mut inputs: Vec<_> =
        entries.map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())).collect();
    inputs.sort();
    inputs
}

/// An input of the corpus, changed in a few places.
fn mutate(inputs: &[(String, Vec<u8>)], rng: &mut SeededRng) -> Vec<u8> {
    let mut input = inputs[rng.below(inputs.len())].1.clone();
    for _ in 0..=rng.below(4) {
        let at = rng.below(input.len() + 1);
        let len = rng.below((input.len() - at).min(16) + 1);
        match rng.below(6) {
            0 if at < input.len() => input[at] ^= 1 << rng.below(8),
            1 => input.truncate(at),
            2 => drop(input.drain(at..at + len)),
            // The longest varint, and a length greater than the input.
            3 => drop(input.splice(at..at + len.min(1), [0xff, 0xff, 0xff, 0xff, 0x0f])),
            4 => {
                let other = &inputs[rng.below(inputs.len())].1;
                let from = rng.below(other.len() + 1);
                input.truncate(at);
                input.extend_from_slice(&other[from..]);
            }
            _ => drop(input.splice(at..at + len, (0..len).map(|_| rng.next_u64() as u8).collect::<Vec<u8>>())),
        }
    }
    input
}
