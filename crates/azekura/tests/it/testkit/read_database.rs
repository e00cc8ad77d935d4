//! A whole database as plain maps, read by iteration in both directions and by gets.

use azekura::{Database, Partition, Result};

use super::history::{Map, State};
use super::random_options::RandomOptions;
use azekura::testing::TestOrder;

/// Every partition with every pair. Each is read forward, backward and key by key; all must agree. The partitions are
/// opened with the options of `shape`.
///
/// # Errors
/// Those of reading. Disagreement panics.
pub(crate) fn read_database(db: &Database, shape: &RandomOptions) -> Result<State> {
    let mut state = State::new();
    for name in db.list_partitions() {
        let pairs = read_partition(&shape.open(db, &name)?, shape.order(&name))?;
        state.insert(name, pairs);
    }
    Ok(state)
}

/// The pairs of one partition, whose keys are in `order`.
fn read_partition(partition: &Partition, order: TestOrder) -> Result<Map> {
    let name = &partition.name;
    let mut pairs: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    for pair in partition.iter() {
        let (key, value) = pair?;
        let rises = pairs.last().is_none_or(|(last, _)| order.canonical(last) < order.canonical(&key));
        assert!(rises, "{name}: keys do not rise at {key:?}");
        pairs.push((key.to_vec(), value.to_vec()));
    }
    let mut backward = pairs.iter().rev();
    for pair in partition.iter().rev() {
        let (key, value) = pair?;
        let same = backward.next().is_some_and(|(k, v)| k[..] == key[..] && v[..] == value[..]);
        assert!(same, "{name}: backward gives {key:?}, forward does not");
    }
    assert!(backward.next().is_none(), "{name}: backward gives fewer pairs");
    for (key, value) in &pairs {
        let got = partition.get(key)?;
        assert_eq!(got.as_deref(), Some(&value[..]), "{name}: get of {key:?}");
    }
    Ok(pairs.into_iter().collect())
}
