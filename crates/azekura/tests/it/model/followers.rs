//! A follower beside the database, compared with the model of the moment at which it caught up last.

use std::collections::BTreeMap;

use azekura::testing::TestOrder;
use azekura::{Database, ErrorKind};

use super::reads::check_partition;
use super::run::{ModelRun, OpenPartition, open_with_order};

/// A follower with its expected content.
pub(super) struct FollowerModel {
    db: Database,
    partitions: BTreeMap<&'static str, OpenPartition>,
}

impl ModelRun {
    /// Opens a follower instead of an earlier one, or catches up with it, and compares a partition or all.
    pub(super) fn follow(&mut self) {
        self.catch_up_clock(); // the follower sees the time of its own reads
        let follower = self.follower.take().filter(|_| !self.rng.chance_one_in(6));
        let config = || self.options.config(&self.test_dir.dir, self.test_dir.unlimited_fs(), &self.env);
        let goes_on = |db: &Database| match db.catch_up() {
            // Changes of a pool were missed, because the follower was too slow and did not know the comparator.
            Err(error) if error.kind() == ErrorKind::Stale => {
                let is_unbuilt = |name: &str, order| self.options.is_pool(name) && order != TestOrder::Bytes;
                assert!(self.partitions.iter().any(|(name, half)| is_unbuilt(name, half.model.order)), "{error}");
                false
            }
            caught_up => caught_up.map(|_| true).unwrap(),
        };
        let db = follower.map(|follower| follower.db).filter(goes_on);
        let db = db.unwrap_or_else(|| config().open_follower().unwrap());
        assert_eq!(db.catch_up().unwrap(), self.db().change_position().unwrap());
        assert_eq!(db.list_partitions(), self.partitions.keys().copied().collect::<Vec<_>>());
        let mut partitions = BTreeMap::new();
        // The others are opened later: until then, their records wait for a comparator.
        let opens_all = self.rng.chance_one_in(2);
        let some = self.random_partition_name();
        for (name, half) in self.partitions.iter().filter(|(name, _)| opens_all || **name == some) {
            let part = open_with_order(&db, &self.options, name, half.model.order);
            partitions.insert(*name, OpenPartition { part, model: half.model.clone() });
        }
        check_partition(&partitions[some], &mut self.rng, &format!("follower: {some}"));
        self.follower = Some(FollowerModel { db, partitions });
    }

    /// Compares a follower that has not caught up since.
    pub(super) fn check_follower(&mut self) {
        self.catch_up_clock();
        let (hour, Some(follower)) = (self.hour, &mut self.follower) else { return };
        for (name, half) in &mut follower.partitions {
            half.model.expire(hour);
            check_partition(half, &mut self.rng, &format!("follower, without catch_up: {name}"));
        }
    }
}
