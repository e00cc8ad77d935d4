//! The commands of scripts that run transactions.

use std::collections::BTreeMap;
use std::fmt::Write;

use azekura::{Database, Isolation, Result, Savepoint, Transaction, TransactionOptions};

use super::text::{ScriptBounds, ScriptKey, append_wrapped, parse_bounds, parse_keys, parse_ttl, show_bytes};

/// The open transactions by name, with their savepoints.
#[derive(Default)]
pub(super) struct ScriptTransactions {
    open: BTreeMap<String, (Transaction, BTreeMap<String, Savepoint>)>,
}

impl ScriptTransactions {
    pub(super) fn clear(&mut self) {
        self.open.clear();
    }

    /// `begin NAME… [snapshot]`; `tx NAME get KEY`, `tx NAME put KEY VALUE`, `tx NAME put-ttl KEY VALUE MS`,
    /// `tx NAME merge KEY VALUE`, `tx NAME remove KEY`, `tx NAME remove-range BOUNDS`,
    /// `tx NAME scan [BOUNDS] [rev]`, `tx NAME first`, `tx NAME last`, `tx NAME savepoint POINT`,
    /// `tx NAME rollback POINT`, `tx NAME commit`, `tx NAME drop`. Keys may name a partition: `partition:key`.
    pub(super) fn run(
        &mut self,
        db: &Database,
        partition: &str,
        name: &str,
        words: &[&str],
        output: &mut String,
    ) -> Result<()> {
        if name == "begin" {
            let isolation = if words.contains(&"snapshot") { Isolation::Snapshot } else { Isolation::Serializable };
            for name in words.iter().filter(|word| **word != "snapshot") {
                let tx = db.transaction_with(TransactionOptions::default().isolation(isolation))?;
                self.open.insert((*name).into(), (tx, BTreeMap::new()));
            }
            return Ok(());
        }
        let (name, command, words) = (words[0], words[1], &words[2..]);
        if command == "commit" || command == "drop" {
            return self.end(name, command, output);
        }
        let (tx, points) = self.open.get_mut(name).unwrap_or_else(|| panic!("there is no transaction {name:?}"));
        let (partition, keys) = match words.first().and_then(|word| word.split_once(':')) {
            Some((partition, keys)) => (partition, keys),
            None => (partition, *words.first().unwrap_or(&"")),
        };
        let p = db.partition(partition)?;
        match command {
            "get" => {
                for key in parse_keys(keys) {
                    let found = tx.get(&p, &key.key)?.map_or("(none)".into(), |value| show_bytes(&value));
                    writeln!(output, "{name}: {}={found}", key.key).unwrap();
                }
            }
            "put" => parse_keys(keys).iter().try_for_each(|key| tx.insert(&p, &key.key, key.value(words[1])))?,
            "merge" => parse_keys(keys).iter().try_for_each(|key| tx.merge(&p, &key.key, key.value(words[1])))?,
            "put-ttl" => {
                let put = |key: &ScriptKey| tx.insert_with_ttl(&p, &key.key, key.value(words[1]), parse_ttl(words[2]));
                parse_keys(keys).iter().try_for_each(put)?;
            }
            "remove" => parse_keys(keys).iter().try_for_each(|key| tx.remove(&p, &key.key))?,
            "remove-range" => match parse_bounds(words[0]) {
                Some(ScriptBounds::Range(low, high)) => tx.remove_range::<String>(&p, (low, high))?,
                _ => panic!("no bounds of a range: {words:?}"),
            },
            "scan" | "first" | "last" => {
                let iter = match words.iter().find_map(|word| parse_bounds(word)).unwrap_or(ScriptBounds::All) {
                    ScriptBounds::All => tx.iter(&p),
                    ScriptBounds::Prefix(prefix) => tx.prefix(&p, prefix),
                    ScriptBounds::Range(low, high) => tx.range::<String>(&p, (low, high)),
                };
                let show = |pair: Result<(azekura::Slice, azekura::Slice)>| {
                    pair.map(|(key, value)| format!("{}={}", show_bytes(&key), show_bytes(&value)))
                };
                let found: Result<Vec<String>> = match command {
                    "scan" if words.contains(&"rev") => iter.rev().map(show).collect(),
                    "scan" => iter.map(show).collect(),
                    "first" => iter.take(1).map(show).collect(),
                    _ => iter.rev().take(1).map(show).collect(),
                };
                let (found, empty) = (found?, ["(empty)".to_owned()]);
                write!(output, "{name}: ").unwrap();
                append_wrapped(output, if found.is_empty() { &empty[..] } else { &found[..] });
            }
            "savepoint" => drop(points.insert(words[0].into(), tx.savepoint())),
            "rollback" => tx.rollback_to(&points[words[0]])?,
            other => panic!("a transaction has no {other:?}"),
        }
        Ok(())
    }

    fn end(&mut self, name: &str, command: &str, output: &mut String) -> Result<()> {
        let (tx, _) = self.open.remove(name).unwrap_or_else(|| panic!("there is no transaction {name:?}"));
        if command == "drop" {
            return Ok(());
        }
        match tx.commit() {
            Ok(()) => writeln!(output, "{name} committed").unwrap(),
            Err(error) => match error.conflicting_key() {
                Some((partition, key)) => {
                    writeln!(output, "{name} conflicts at {} in {partition}", show_bytes(key)).unwrap();
                }
                None => return Err(error),
            },
        }
        Ok(())
    }
}
