//! Requested and acknowledged writes, and the states that a crash may leave.

use std::collections::BTreeMap;

/// The pairs of one partition.
pub(crate) type Map = BTreeMap<Vec<u8>, Vec<u8>>;
/// The partitions of a database by name.
pub(crate) type State = BTreeMap<String, Map>;

/// One write of a commit; a removal if it has no value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HistoryWrite {
    pub(crate) partition: String,
    pub(crate) key: Vec<u8>,
    pub(crate) value: Option<Vec<u8>>,
}

/// An atomic change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum HistoryEvent {
    Create(String),
    Drop(String),
    Commit(Vec<HistoryWrite>),
}

impl HistoryEvent {
    /// Applies the event to a state.
    pub(crate) fn apply(&self, state: &mut State) {
        match self {
            HistoryEvent::Create(name) => _ = state.entry(name.clone()).or_default(),
            HistoryEvent::Drop(name) => _ = state.remove(name),
            HistoryEvent::Commit(writes) => {
                for write in writes {
                    let Some(map) = state.get_mut(&write.partition) else { continue };
                    match &write.value {
                        Some(value) => _ = map.insert(write.key.clone(), value.clone()),
                        None => _ = map.remove(&write.key),
                    }
                }
            }
        }
    }
}

/// Everything that was requested of a database, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct WriteHistory {
    pub(crate) events: Vec<HistoryEvent>,
    /// Number of acknowledged events, from the first on.
    pub(crate) acknowledged: usize,
    /// Number of events that must survive power loss.
    pub(crate) durable: usize,
}

impl WriteHistory {
    /// Records that an event is about to be requested. There is one at a time.
    pub(crate) fn begin_event(&mut self, event: HistoryEvent) {
        assert_eq!(self.acknowledged, self.events.len(), "an earlier event is not acknowledged");
        self.events.push(event);
    }

    /// Records that the last event was acknowledged.
    pub(crate) fn acknowledge_event(&mut self) {
        self.acknowledged = self.events.len();
    }

    /// Records that everything acknowledged so far must survive power loss.
    pub(crate) fn mark_durable(&mut self) {
        self.durable = self.acknowledged;
    }

    /// Truncates the history to the first `count` events, after an open that found this state and has made it durable.
    /// Partitions whose creation or deletion is not among them are created or deleted by further events. Returns the
    /// fewest events, at least `min_events`, after which the pairs are the same.
    pub(crate) fn recover(&mut self, found: &State, min_events: usize, count: usize) -> usize {
        let wanted = full(found);
        let fewest = (min_events..count).find(|events| full(&self.state_after(*events)) == wanted).unwrap_or(count);
        self.events.truncate(count);
        let expected = self.state_after(count);
        let fresh = found.keys().filter(|name| !expected.contains_key(*name)).cloned().map(HistoryEvent::Create);
        let dropped = expected.keys().filter(|name| !found.contains_key(*name)).cloned().map(HistoryEvent::Drop);
        self.events.extend(fresh.chain(dropped));
        self.acknowledge_event();
        self.mark_durable();
        fewest
    }

    /// The state after the first `count` events.
    pub(crate) fn state_after(&self, count: usize) -> State {
        let mut state = State::new();
        self.events[..count].iter().for_each(|event| event.apply(&mut state));
        state
    }

    /// The longest prefix of the history that equals `found`, if it has at least `min_events` events.
    ///
    /// All partitions are compared at once. An empty partition has no content: its creation or deletion may be ahead
    /// of or behind the commits, but not behind the first `min_events` events.
    pub(crate) fn matching_prefix(&self, found: &State, min_events: usize) -> Result<usize, String> {
        let found_full = full(found);
        let mut state = self.state_after(min_events);
        let mut existed: BTreeMap<String, [bool; 2]> = BTreeMap::new();
        let names: Vec<String> = self
            .events
            .iter()
            .filter_map(|e| if let HistoryEvent::Create(name) = e { Some(name.clone()) } else { None })
            .collect();
        let mut matched = None;
        for count in min_events..=self.events.len() {
            if count > min_events {
                self.events[count - 1].apply(&mut state);
            }
            for name in &names {
                existed.entry(name.clone()).or_default()[usize::from(state.contains_key(name))] = true;
            }
            if full(&state) == found_full {
                matched = Some(count);
            }
        }
        if let Some(name) = found.keys().find(|name| !existed.contains_key(*name)) {
            return Err(format!("partition {name:?} was never created"));
        }
        for (name, ways) in existed {
            if !ways[usize::from(found.contains_key(&name))] {
                let what = if found.contains_key(&name) { "is back" } else { "is missing" };
                return Err(format!("partition {name:?} {what}"));
            }
        }
        matched.ok_or_else(|| self.describe_mismatch(&found_full, min_events))
    }

    /// The nearest prefix, and its differences from `found`.
    fn describe_mismatch(&self, found: &State, min_events: usize) -> String {
        let mut best: Option<(usize, Vec<String>)> = None;
        for count in 0..=self.events.len() {
            let differences = differences(&self.state_after(count), found);
            if best.as_ref().is_none_or(|(_, least)| differences.len() <= least.len()) {
                best = Some((count, differences));
            }
        }
        let (count, differences) = best.expect("there is the empty prefix");
        let (asked, acknowledged) = (self.events.len(), self.acknowledged);
        format!(
            "no prefix of {min_events}..={asked} events ({acknowledged} acknowledged); nearest {count}, but: {}: {}",
            differences.len(),
            differences.iter().take(6).cloned().collect::<Vec<_>>().join(", ")
        )
    }
}

/// The partitions that have pairs.
fn full(state: &State) -> State {
    state.iter().filter(|(_, map)| !map.is_empty()).map(|(name, map)| (name.clone(), map.clone())).collect()
}

/// The pairs in which two states differ, as text.
pub(crate) fn differences(wanted: &State, found: &State) -> Vec<String> {
    let mut list = Vec::new();
    let empty = Map::new();
    let names: std::collections::BTreeSet<&String> = wanted.keys().chain(found.keys()).collect();
    for name in names {
        let (wanted, found) = (wanted.get(name).unwrap_or(&empty), found.get(name).unwrap_or(&empty));
        let keys: std::collections::BTreeSet<&Vec<u8>> = wanted.keys().chain(found.keys()).collect();
        for key in keys.into_iter().filter(|key| wanted.get(*key) != found.get(*key)) {
            let show = |value: Option<&Vec<u8>>| match value {
                Some(value) => format!("{} bytes {}", value.len(), value[..value.len().min(12)].escape_ascii()),
                None => "nothing".to_owned(),
            };
            let key_text = key[..key.len().min(20)].escape_ascii();
            list.push(format!("{name}/{key_text}: {} instead of {}", show(found.get(key)), show(wanted.get(key))));
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    fn insert_write(partition: &str, key: &str) -> HistoryWrite {
        HistoryWrite { partition: partition.into(), key: key.into(), value: Some(b"v".to_vec()) }
    }

    fn sample_history() -> WriteHistory {
        let mut history = WriteHistory::default();
        let both = HistoryEvent::Commit(vec![insert_write("a", "1"), insert_write("b", "1")]);
        for event in [
            HistoryEvent::Create("a".into()),
            HistoryEvent::Create("b".into()),
            both,
            HistoryEvent::Commit(vec![insert_write("a", "2")]),
        ] {
            history.begin_event(event);
            history.acknowledge_event();
        }
        history
    }

    #[test]
    fn prefixes_are_found_and_holes_are_not_forgiven() {
        let mut history = sample_history();
        for count in 2..=4 {
            assert_eq!(history.matching_prefix(&history.state_after(count), 0), Ok(count));
        }
        assert!(history.matching_prefix(&history.state_after(2), 3).is_err(), "fewer than min_events");
        let mut torn = history.state_after(4);
        torn.get_mut("b").unwrap().clear();
        assert!(history.matching_prefix(&torn, 0).is_err(), "half of a batch");
        let mut hole = history.state_after(4);
        hole.get_mut("a").unwrap().remove(b"1".as_slice());
        assert!(history.matching_prefix(&hole, 0).is_err());
        history.begin_event(HistoryEvent::Drop("b".into()));
        history.acknowledge_event();
        assert_eq!(history.matching_prefix(&history.state_after(5), 4), Ok(5));
        assert!(history.matching_prefix(&history.state_after(4), 5).unwrap_err().contains("is back"));
    }

    #[test]
    fn empty_partition_may_differ_after_min_events() {
        let history = sample_history();
        assert_eq!(history.matching_prefix(&State::new(), 0), Ok(2), "the longest that fits");
        let early = State::from([("b".to_owned(), Map::new())]);
        assert_eq!(history.matching_prefix(&early, 0), Ok(2));
        assert!(history.matching_prefix(&early, 1).unwrap_err().contains("\"a\" is missing"));
        let foreign = State::from([("c".to_owned(), Map::new())]);
        assert!(history.matching_prefix(&foreign, 0).is_err());
    }
}
