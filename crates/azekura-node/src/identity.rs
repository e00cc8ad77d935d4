//! Which node of which cluster a database belongs to.

use crate::error::Failure;
use azekura::{Database, Partition, PersistMode};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Partition with the records [`NODE_KEY`] and [`NUMBER_KEY`].
const PARTITION: &str = "node";
/// The id of the node and the name of the cluster.
const NODE_KEY: &str = "identity";
/// The number of the cluster.
const NUMBER_KEY: &str = "cluster";

/// A number that no other call returns, in all probability.
pub(crate) fn random_number() -> u64 {
    RandomState::new().hash_one(())
}

/// The cluster of a node: a name, which operators choose, and a number, which is drawn when the cluster is formed. Two
/// clusters of the same name would otherwise replace each other's logs if an address was wrong.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) name: String,
    database: Database,
    partition: Partition,
    /// None until the node forms a cluster, or gets the first message of one.
    number: Mutex<Option<u64>>,
}

impl Membership {
    /// Stores which node the database is of, or checks it.
    pub(crate) fn open(database: &Database, id: u64, name: &str) -> io::Result<Membership> {
        let partition = database.open_partition(PARTITION, Default::default()).map_err(io::Error::other)?;
        let expected = format!("{id} {name}");
        match partition.get(NODE_KEY).map_err(io::Error::other)? {
            Some(stored) if stored[..] == *expected.as_bytes() => {}
            Some(stored) => {
                let stored = String::from_utf8_lossy(&stored).into_owned();
                let (stored_id, stored_name) = stored.split_once(' ').unwrap_or((&stored, ""));
                let why = format!(
                    "the directory is that of node {stored_id} of cluster `{stored_name}`, not of node {id} of \
                     cluster `{name}`"
                );
                return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
            }
            None => {
                partition.insert(NODE_KEY, expected).map_err(io::Error::other)?;
                database.persist(PersistMode::SyncAll).map_err(io::Error::other)?;
            }
        }
        let number = partition.get(NUMBER_KEY).map_err(io::Error::other)?;
        let number = number.map(|number| {
            let text = String::from_utf8_lossy(&number).into_owned();
            u64::from_str_radix(&text, 16).map_err(|_| io::Error::other(format!("`{text}` is no number of a cluster")))
        });
        let number = Mutex::new(number.transpose()?);
        Ok(Membership { name: name.to_owned(), database: database.clone(), partition, number })
    }

    fn lock(&self) -> MutexGuard<'_, Option<u64>> {
        self.number.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What messages to other nodes say of the cluster: its name, and its number if there is one.
    pub(crate) fn header(&self) -> String {
        let number = self.lock().map_or_else(String::new, |number| format!("{number:016x}"));
        format!("{}/{number}", self.name)
    }

    /// Checks the header of a message. A node that has no cluster yet becomes one of the sender's.
    ///
    /// # Errors
    /// `Misdirected` if the sender belongs to another cluster.
    pub(crate) fn check(&self, header: &str) -> Result<(), Failure> {
        let (name, number) = header.rsplit_once('/').unwrap_or((header, ""));
        let foreign =
            |why: String| Err(Failure::Misdirected(format!("this is a node of cluster `{}`, {why}", self.name)));
        if name != self.name {
            return foreign(format!("not of `{name}`"));
        }
        let Ok(number) = u64::from_str_radix(number, 16) else {
            return foreign("and the message has no number of a cluster".into());
        };
        let mut own = self.lock();
        match *own {
            Some(own) if own == number => Ok(()),
            Some(own) => foreign(format!("but of the one with number {own:016x}, not of {number:016x}")),
            None => {
                self.store(number)?;
                *own = Some(number);
                Ok(())
            }
        }
    }

    /// Draws a number for a cluster that is formed, unless the node has one. Returns whether it did.
    pub(crate) fn draw(&self) -> Result<bool, Failure> {
        let mut own = self.lock();
        if own.is_some() {
            return Ok(false);
        }
        let number = random_number();
        self.store(number)?;
        *own = Some(number);
        Ok(true)
    }

    /// Forgets the number, because the cluster was not formed.
    pub(crate) fn forget(&self) -> azekura::Result<()> {
        let mut own = self.lock();
        if own.is_some() {
            tokio::task::block_in_place(|| {
                self.partition.remove(NUMBER_KEY)?;
                self.database.persist(PersistMode::SyncData)
            })?;
            *own = None;
        }
        Ok(())
    }

    fn store(&self, number: u64) -> Result<(), Failure> {
        tokio::task::block_in_place(|| {
            self.partition.insert(NUMBER_KEY, format!("{number:016x}"))?;
            Ok(self.database.persist(PersistMode::SyncData)?)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Membership;
    use azekura::testing::{MemFs, Survival};
    use azekura::{Config, Database};
    use std::sync::Arc;

    fn open(fs: &MemFs) -> (Database, Membership) {
        let database = Config::new("/node").fs(Arc::new(fs.clone())).open().unwrap();
        let membership = Membership::open(&database, 1, "a/b").unwrap();
        (database, membership)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn first_message_decides_the_cluster() {
        let fs = MemFs::new();
        for round in 0..2 {
            let (database, membership) = open(&fs);
            for header in ["", "a", "a/b", "a/b/", "a/7", "a/b/x", "/a/b/7"] {
                assert!(membership.check(header).is_err(), "{header}");
            }
            assert!(round == 1 || membership.header() == "a/b/");
            membership.check("a/b/7").unwrap();
            assert!(membership.check("a/b/8").is_err());
            assert!(!membership.draw().unwrap());
            assert_eq!(membership.header(), "a/b/0000000000000007");
            drop(membership);
            database.close().unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn cluster_that_was_not_formed_is_forgotten() {
        let fs = MemFs::new();
        let (database, membership) = open(&fs);
        assert!(membership.draw().unwrap());
        assert_ne!(membership.header(), "a/b/");
        membership.forget().unwrap();
        // Also after power loss: the node would refuse every cluster.
        let after = fs.fork();
        after.crash(Survival::Nothing, 0);
        open(&after).1.check("a/b/7").unwrap();
        drop(membership);
        database.close().unwrap();
        open(&fs).1.check("a/b/7").unwrap();
    }
}
