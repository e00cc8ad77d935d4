//! What was asked for and what was acknowledged, and which states a crash may leave of it.

use std::collections::BTreeMap;

/// The pairs of one partition.
pub(crate) type Map = BTreeMap<Vec<u8>, Vec<u8>>;
/// The partitions of a database by name.
pub(crate) type State = BTreeMap<String, Map>;

/// One write of a commit; without a value it removes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) partition: String,
    pub(crate) key: Vec<u8>,
    pub(crate) value: Option<Vec<u8>>,
}

/// What happens whole or not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Create(String),
    Drop(String),
    Commit(Vec<Write>),
}

impl Event {
    /// What it makes of a state.
    pub(crate) fn apply(&self, state: &mut State) {
        match self {
            Event::Create(name) => _ = state.entry(name.clone()).or_default(),
            Event::Drop(name) => _ = state.remove(name),
            Event::Commit(writes) => {
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

/// Everything that was asked of a database, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    pub(crate) events: Vec<Event>,
    /// So many events, from the first on, were acknowledged.
    pub(crate) acknowledged: usize,
    /// So many must survive power loss.
    pub(crate) durable: usize,
}

impl History {
    /// Notes that an event is about to be asked for. There is one at a time.
    pub(crate) fn ask(&mut self, event: Event) {
        assert_eq!(self.acknowledged, self.events.len(), "one at a time");
        self.events.push(event);
    }

    /// Notes that the last event asked for was acknowledged.
    pub(crate) fn acknowledge(&mut self) {
        self.acknowledged = self.events.len();
    }

    /// Notes that everything acknowledged so far was promised to survive power loss.
    pub(crate) fn promise(&mut self) {
        self.durable = self.acknowledged;
    }

    /// The state after the first `count` events.
    pub(crate) fn state(&self, count: usize) -> State {
        let mut state = State::new();
        self.events[..count].iter().for_each(|event| event.apply(&mut state));
        state
    }

    /// Which prefix of the history `found` is, the longest that fits, if it is one of at least `floor` events.
    ///
    /// Contents are compared strictly, over all partitions at once. An empty partition has no content: its creation or
    /// deletion may be ahead of or behind the commits, but not behind `floor`.
    pub(crate) fn judge(&self, found: &State, floor: usize) -> Result<usize, String> {
        let full = |state: &State| -> State {
            state.iter().filter(|(_, map)| !map.is_empty()).map(|(name, map)| (name.clone(), map.clone())).collect()
        };
        let found_full = full(found);
        let mut state = self.state(floor);
        let mut existed: BTreeMap<String, [bool; 2]> = BTreeMap::new();
        let names: Vec<String> = self
            .events
            .iter()
            .filter_map(|e| if let Event::Create(name) = e { Some(name.clone()) } else { None })
            .collect();
        let mut matched = None;
        for count in floor..=self.events.len() {
            if count > floor {
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
                let what = if found.contains_key(&name) { "is back" } else { "is gone" };
                return Err(format!("partition {name:?} {what}"));
            }
        }
        matched.ok_or_else(|| self.explain(&found_full, floor))
    }

    /// The nearest prefix, and how `found` differs from it.
    fn explain(&self, found: &State, floor: usize) -> String {
        let mut best: Option<(usize, Vec<String>)> = None;
        for count in 0..=self.events.len() {
            let differences = differences(&self.state(count), found);
            if best.as_ref().is_none_or(|(_, least)| differences.len() <= least.len()) {
                best = Some((count, differences));
            }
        }
        let (count, differences) = best.expect("there is the empty prefix");
        let (asked, acknowledged) = (self.events.len(), self.acknowledged);
        format!(
            "no prefix of {floor}..={asked} events ({acknowledged} acknowledged); nearest is {count}, but for {}: {}",
            differences.len(),
            differences.iter().take(6).cloned().collect::<Vec<_>>().join(", ")
        )
    }
}

/// The pairs in which two states differ, for the eyes.
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

    fn put(partition: &str, key: &str) -> Write {
        Write { partition: partition.into(), key: key.into(), value: Some(b"v".to_vec()) }
    }

    fn history() -> History {
        let mut history = History::default();
        let both = Event::Commit(vec![put("a", "1"), put("b", "1")]);
        for event in [Event::Create("a".into()), Event::Create("b".into()), both, Event::Commit(vec![put("a", "2")])] {
            history.ask(event);
            history.acknowledge();
        }
        history
    }

    #[test]
    fn prefixes_are_found_and_holes_are_not_forgiven() {
        let mut history = history();
        for count in 2..=4 {
            assert_eq!(history.judge(&history.state(count), 0), Ok(count));
        }
        assert!(history.judge(&history.state(2), 3).is_err(), "behind the floor");
        let mut torn = history.state(4);
        torn.get_mut("b").unwrap().clear();
        assert!(history.judge(&torn, 0).is_err(), "half of a batch");
        let mut hole = history.state(4);
        hole.get_mut("a").unwrap().remove(b"1".as_slice());
        assert!(history.judge(&hole, 0).is_err());
        history.ask(Event::Drop("b".into()));
        history.acknowledge();
        assert_eq!(history.judge(&history.state(5), 4), Ok(5));
        assert!(history.judge(&history.state(4), 5).unwrap_err().contains("is back"));
    }

    #[test]
    fn empty_partitions_may_be_early_or_late_but_not_behind_the_floor() {
        let history = history();
        assert_eq!(history.judge(&State::new(), 0), Ok(2), "the longest that fits");
        let early = State::from([("b".to_owned(), Map::new())]);
        assert_eq!(history.judge(&early, 0), Ok(2));
        assert!(history.judge(&early, 1).unwrap_err().contains("\"a\" is gone"));
        let stranger = State::from([("c".to_owned(), Map::new())]);
        assert!(history.judge(&stranger, 0).is_err());
    }
}
