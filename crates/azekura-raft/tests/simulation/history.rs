//! What clients saw, and whether it is linearizable.
//!
//! Each key has a list of numbers. Numbers are appended once, so the final list tells where each append took effect.

use std::collections::BTreeMap;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// This number was appended.
    Append(u64),
    /// The list that was read.
    Read(Vec<u64>),
}

/// One call of a client. `end` is `None` if the client does not know whether it took effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) key: u8,
    pub(crate) begin: u64,
    pub(crate) end: Option<u64>,
    pub(crate) seen: Seen,
}

/// Calls, ordered by a clock that counts their begins and ends.
#[derive(Debug, Default)]
pub(crate) struct History {
    clock: u64,
    pub(crate) calls: Vec<Call>,
}

impl History {
    pub(crate) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Checks all calls against the final lists.
    pub(crate) fn check(&self, lists: &BTreeMap<u8, Vec<u64>>) -> Result<(), String> {
        for (key, list) in lists {
            let calls: Vec<&Call> = self.calls.iter().filter(|call| call.key == *key).collect();
            check_list(&calls, list).map_err(|why| format!("list {key}: {why}; {list:?}"))?;
        }
        let without_list = self
            .calls
            .iter()
            .find(|call| !lists.contains_key(&call.key) && call.end.is_some() && call.seen != Seen::Read(Vec::new()));
        without_list.map_or(Ok(()), |call| Err(format!("list {} is missing: {call:?}", call.key)))
    }
}

fn check_list(calls: &[&Call], list: &[u64]) -> Result<(), String> {
    for (i, number) in list.iter().enumerate() {
        if list[..i].contains(number) {
            return Err(format!("{number} is in it twice"));
        }
    }
    // Between which lengths of the list each call took effect: an append at position p between p and p + 1.
    let mut lengths = Vec::new();
    for call in calls {
        match &call.seen {
            Seen::Append(number) => match list.iter().position(|known| known == number) {
                Some(position) => lengths.push((*call, position, position + 1)),
                None if call.end.is_some() => return Err(format!("acknowledged {number} is lost")),
                None => {}
            },
            Seen::Read(read) if list.starts_with(read) => lengths.push((*call, read.len(), read.len())),
            Seen::Read(read) => return Err(format!("a read returned {read:?}")),
        }
    }
    for (earlier, _, after) in &lengths {
        for (later, before, _) in &lengths {
            if earlier.end.is_some_and(|end| end < later.begin) && after > before {
                return Err(format!("{later:?} does not see {earlier:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn wrong_histories_are_found() {
    let call = |begin, end, seen| Call { key: 1, begin, end, seen };
    let check = |calls: &[Call], list: &[u64]| {
        History { clock: 0, calls: calls.to_vec() }.check(&BTreeMap::from([(1, list.to_vec())]))
    };
    let (append, read) = (Seen::Append, Seen::Read);
    let good = [
        call(1, Some(4), append(7)),
        call(2, Some(3), read(vec![])),
        call(5, None, append(8)),
        call(6, Some(9), append(9)),
        call(10, Some(11), read(vec![7, 9])),
        call(12, Some(13), read(vec![7, 9, 8])),
    ];
    check(&good, &[7, 9, 8]).unwrap();
    let last = |seen| [&good[..], &[call(14, Some(15), seen)]].concat();
    for (calls, list, why) in [
        (last(append(10)), &[7, 9, 8][..], "acknowledged 10 is lost"),
        (vec![call(1, Some(2), append(7)), call(3, Some(4), append(10))], &[10, 7], "does not see"),
        (last(read(vec![7, 9])), &[7, 9, 8], "does not see"),
        (last(read(vec![9])), &[7, 9, 8], "a read returned [9]"),
        (good.to_vec(), &[7, 9, 9, 8], "twice"),
    ] {
        let error = check(&calls, list).unwrap_err();
        assert!(error.contains(why), "{why}: {error}");
    }
    assert!(History { clock: 0, calls: good.to_vec() }.check(&BTreeMap::new()).is_err());
}
