//! Random tests by `proptest`: a failing case is reduced to few operations.
//!
//! Each operation has a seed of its own for its random choices, so these stay the same when other operations are
//! removed.

use proptest::collection::vec;
use proptest::prelude::any;
use proptest::strategy::{Just, Strategy, Union};
use proptest::test_runner::{Config, RngAlgorithm, TestError, TestRng, TestRunner};

/// Time limit for reducing a failing case.
const MAX_SHRINK_MS: u32 = 300_000;
/// Mean number of operations that are removed together first.
const CHUNK_LEN: usize = 32;

/// A kind of operation, and the seed of its random choices.
#[derive(Clone, Debug)]
pub(crate) struct RandomOp {
    pub(crate) name: &'static str,
    pub(crate) seed: u64,
}

/// About `mean` operations, drawn by their weights.
pub(crate) fn random_ops(weights: &[(&'static str, u32)], mean: usize) -> impl Strategy<Value = Vec<RandomOp>> + use<> {
    let names = Union::new_weighted(weights.iter().map(|(name, weight)| (*weight, Just(*name))).collect());
    let op = (names, any::<u64>().no_shrink()).prop_map(|(name, seed)| RandomOp { name, seed });
    chunked(op, mean)
}

/// About `mean` seeds, one for each step of a random test.
pub(crate) fn random_seeds(mean: usize) -> impl Strategy<Value = Vec<u64>> {
    chunked(any::<u64>().no_shrink(), mean)
}

/// About `mean` items in chunks: whole chunks are removed from a failing case before single items are.
fn chunked<S: Strategy>(item: S, mean: usize) -> impl Strategy<Value = Vec<S::Value>>
where
    S::Value: Clone,
{
    let chunks = (mean / CHUNK_LEN).max(1);
    vec(vec(item, 1..=2 * CHUNK_LEN), 1..=2 * chunks).prop_map(|chunks| chunks.concat())
}

/// Runs `check` with one value of `strategy`, which the seed determines. If it panics, panics with the smallest value
/// that was found to fail too, and says how to repeat it.
pub(crate) fn check_property<S: Strategy>(test: &str, seed: u64, strategy: &S, check: impl Fn(S::Value)) {
    let config = Config { cases: 1, failure_persistence: None, max_shrink_time: MAX_SHRINK_MS, ..Config::default() };
    let mut seed_bytes = [0; 32];
    seed_bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed_bytes);
    let outcome = TestRunner::new_with_rng(config, rng).run(strategy, |value| {
        check(value);
        Ok(())
    });
    match outcome {
        Ok(()) => {}
        Err(TestError::Abort(reason)) => panic!("no case was run: {reason}"),
        Err(TestError::Fail(reason, value)) => panic!(
            "{reason}\nsmallest failing case: {value:?}\n\
             again: AZEKURA_SEED={seed} cargo test -p azekura --test it -- {test}"
        ),
    }
}

#[test]
fn failing_case_is_reduced_to_few_ops() {
    let ops = random_ops(&[("insert", 1), ("remove", 1)], 200);
    let failure = std::panic::catch_unwind(|| {
        check_property("this test", 1, &ops, |ops| {
            let removes = ops.iter().filter(|op| op.name == "remove").count();
            assert!(removes < 2, "two are too many");
        });
    });
    let message = *failure.unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("two are too many") && message.contains("AZEKURA_SEED=1"), "{message}");
    let count_of = |name: &str| message.matches(name).count();
    assert!(count_of("remove") == 2 && count_of("insert") <= 4, "{message}");
}

#[test]
fn same_seed_gives_same_case() {
    let draw = |seed| {
        let drawn = std::cell::RefCell::new(Vec::new());
        check_property("this test", seed, &random_seeds(50), |seeds| *drawn.borrow_mut() = seeds);
        drawn.into_inner()
    };
    assert_eq!(draw(7), draw(7));
    assert_ne!(draw(7), draw(8));
}
