//! openraft's own test suite, on both kinds of partition.

use azekura::testing::MemFs;
use azekura::{Batch, Config, Database, EngineType, PartitionCreateOptions, PersistMode, PmemOptions};
use azekura_raft::{Application, LogStore, State, StateMachine, Syncer};
use openraft::StorageError;
use openraft::testing::log::{StoreBuilder, Suite};
use openraft::type_config::TypeConfigExt;
use std::io;
use std::sync::Arc;

openraft::declare_raft_types!(
    /// Commands and responses are texts.
    pub Types: D = String, R = String
);

/// Counts the commands, and keeps the last one.
struct Last(PartitionCreateOptions);

impl Application for Last {
    type Command = String;
    type Response = String;

    fn partitions(&self) -> Vec<(String, PartitionCreateOptions)> {
        vec![("last".into(), self.0.clone())]
    }

    fn apply(&self, state: &State, batch: &mut Batch, command: &String) -> azekura::Result<String> {
        let partition = state.partition("last").expect("named above");
        let before = partition.get("last")?.unwrap_or_default();
        batch.insert(partition, "last", command);
        Ok(String::from_utf8_lossy(&before).into_owned())
    }
}

struct Builder {
    options: PartitionCreateOptions,
    is_inline: bool,
}

impl StoreBuilder<Types, LogStore<Types>, StateMachine<Types, Last>, Database> for Builder {
    async fn build(&self) -> Result<(Database, LogStore<Types>, StateMachine<Types, Last>), StorageError<Types>> {
        let database = Config::new("/raft").fs(Arc::new(MemFs::new())).open().unwrap();
        let own = database.clone();
        let syncer = match self.is_inline {
            true => Syncer::inline(move || own.persist(PersistMode::SyncData).map_err(io::Error::other)),
            false => Syncer::new(&database).unwrap(),
        };
        let log = LogStore::open(&database, 7, self.options.clone(), Arc::new(syncer)).unwrap();
        let state = StateMachine::open(&log, Last(self.options.clone())).unwrap();
        Ok((database, log, state))
    }
}

fn run(options: PartitionCreateOptions, is_inline: bool) {
    Types::run(async { Suite::test_all(Builder { options, is_inline }).await.unwrap() });
}

#[test]
fn lsm_partitions_pass_the_suite() {
    run(PartitionCreateOptions::default(), false);
}

#[test]
fn pools_pass_the_suite() {
    run(PartitionCreateOptions::default().engine(EngineType::Pmem(PmemOptions::default())), true);
}
