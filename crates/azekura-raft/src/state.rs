//! The replicated state: an application's partitions, and what was applied to them last.
//!
//! Partitions are named `raft.state.GROUP.GENERATION.NAME`. A received snapshot is written to partitions of a new
//! generation; one synced commit of the field `Applied` switches to them, and those of the old generation are deleted.
//! The field is set by each commit that applies an entry, so both are always at the same position.

use crate::codec::io_error;
use crate::log::{Field, RaftLog};
use azekura::{Batch, Database, Partition, PartitionCreateOptions, PersistMode, Snapshot};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use xxhash_rust::xxh3::xxh3_64;

/// What an application does with the commands that Raft has committed.
pub trait Application: Send + Sync + 'static {
    /// What is replicated. Logged by postcard, which does not support the serde attributes `untagged`, `flatten` and
    /// `skip_serializing_if`.
    type Command;
    /// What the client that proposed a command gets.
    type Response;

    /// Names and options of the partitions of the state: the same on each node and at each start.
    fn partitions(&self) -> Vec<(String, PartitionCreateOptions)>;

    /// Adds the effect of a command to `batch`, which is committed afterwards. Earlier commands are visible in `state`.
    ///
    /// Must be a function of the state and the command alone: the same on each node. So neither clocks nor random
    /// numbers, nor records that expire.
    ///
    /// # Errors
    /// An error stops the node; the command is applied again after its restart. A command that the application refuses
    /// is a response instead.
    fn apply(&self, state: &State, batch: &mut Batch, command: &Self::Command) -> azekura::Result<Self::Response>;
}

/// The partitions of a state.
#[derive(Debug)]
pub struct State {
    group: u64,
    generation: u64,
    /// In ascending order of their names.
    partitions: Vec<(String, Partition)>,
}

impl State {
    /// The number of the group.
    pub fn group(&self) -> u64 {
        self.group
    }

    /// The partition with this name, if [`Application::partitions`] has it.
    pub fn partition(&self, name: &str) -> Option<&Partition> {
        self.partitions.iter().find(|(known, _)| known == name).map(|(_, partition)| partition)
    }

    /// In ascending order of their names.
    pub(crate) fn partitions(&self) -> impl Iterator<Item = (&str, &Partition)> {
        self.partitions.iter().map(|(name, partition)| (name.as_str(), partition))
    }

    /// Deletes the partitions by their handles, because their names may be those of others later. What cannot be
    /// deleted now is deleted at the next open.
    fn delete(&self, database: &Database) {
        for (_, partition) in self.partitions() {
            let _ = database.delete_partition(partition.clone());
        }
    }
}

/// Reads the state of a node. Clones read the same state.
#[derive(Clone, Debug)]
pub struct StateReader(Arc<RwLock<Arc<State>>>);

impl StateReader {
    /// The partitions of the state, until a snapshot is installed: reads of them return `Closed` from then on, and a
    /// further call returns the new ones.
    pub fn current(&self) -> Arc<State> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The stored state of a group.
#[derive(Debug)]
pub(crate) struct StateStore<A> {
    log: RaftLog,
    application: A,
    current: StateReader,
    /// The highest generation that has or had partitions. Received states have a clone, which tells their store.
    generations: Arc<AtomicU64>,
}

/// The state of a snapshot that is received. Dropped before it is installed, it deletes its partitions.
#[derive(Debug)]
pub(crate) struct ReceivedState {
    database: Database,
    generations: Arc<AtomicU64>,
    /// None if it is installed.
    state: Option<State>,
}

impl ReceivedState {
    pub(crate) fn state(&self) -> Option<&State> {
        self.state.as_ref()
    }
}

impl Drop for ReceivedState {
    fn drop(&mut self) {
        if let Some(state) = self.state.take() {
            state.delete(&self.database);
        }
    }
}

/// What was applied last in Raft's terms, as bytes, with the generation of the partitions.
///
/// Value of the field `Applied`: generation u64 BE, position.
pub(crate) struct Applied {
    generation: u64,
    pub(crate) position: Vec<u8>,
}

impl Applied {
    pub(crate) fn decode(value: &[u8]) -> io::Result<Applied> {
        let (generation, position) = value.split_first_chunk().ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, format!("applied state: {} bytes", value.len()))
        })?;
        Ok(Applied { generation: u64::from_be_bytes(*generation), position: position.to_vec() })
    }

    fn encode(generation: u64, position: &[u8]) -> Vec<u8> {
        [&generation.to_be_bytes(), position].concat()
    }
}

impl<A: Application> StateStore<A> {
    /// Opens the partitions of the current generation, and deletes those of snapshots that were not installed.
    pub(crate) fn open(log: RaftLog, application: A) -> io::Result<StateStore<A>> {
        let applied = log.field(Field::Applied).map_err(io_error)?;
        let applied = applied.map(|value| Applied::decode(&value)).transpose()?;
        let generation = applied.as_ref().map_or(0, |applied| applied.generation);
        let state = State { group: log.group(), generation, partitions: Vec::new() };
        let current = StateReader(Arc::new(RwLock::new(Arc::new(state))));
        let generations = Arc::new(AtomicU64::new(generation));
        let store = StateStore { log, application, current, generations };
        let stored = store.stored_generations();
        let has_partitions = !store.application.partitions().is_empty();
        if applied.is_some() && has_partitions && !stored.iter().any(|(_, stored)| *stored == generation) {
            let why = format!("no partition of generation {generation} exists, although entries were applied to it");
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        for (name, _) in stored.iter().filter(|(_, stored)| *stored != generation) {
            store.log.database().delete_partition_by_name(name).map_err(io_error)?;
        }
        let state = Arc::new(store.open_generation(generation)?);
        *store.current.0.write().unwrap_or_else(PoisonError::into_inner) = state;
        Ok(store)
    }

    fn name_prefix(&self) -> String {
        format!("raft.state.{}.", self.log.group())
    }

    fn open_generation(&self, generation: u64) -> io::Result<State> {
        let open = |(name, options): (String, PartitionCreateOptions)| {
            let full_name = format!("{}{generation}.{name}", self.name_prefix());
            Ok((name, self.log.database().open_partition(&full_name, options).map_err(io_error)?))
        };
        let mut partitions = self.application.partitions().into_iter().map(open).collect::<io::Result<Vec<_>>>()?;
        partitions.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(State { group: self.log.group(), generation, partitions })
    }

    /// The partitions of all generations of this group, with their generations.
    fn stored_generations(&self) -> Vec<(String, u64)> {
        let prefix = self.name_prefix();
        let generation = |name: &str| name.strip_prefix(&prefix)?.split('.').next()?.parse().ok();
        let names = self.log.database().list_partitions().into_iter();
        names.filter_map(|name| generation(&name).map(|generation| (name, generation))).collect()
    }

    pub(crate) fn reader(&self) -> StateReader {
        self.current.clone()
    }

    /// What was applied last.
    pub(crate) fn position(&self) -> io::Result<Option<Vec<u8>>> {
        let applied = self.log.field(Field::Applied).map_err(io_error)?;
        applied.map(|value| Ok(Applied::decode(&value)?.position)).transpose()
    }

    /// Applies one entry, whose command is None if it has none, and stores its position, in one commit.
    pub(crate) fn apply(&self, command: Option<&A::Command>, position: &[u8]) -> io::Result<Option<A::Response>> {
        let state = self.current.current();
        let mut batch = self.log.database().batch();
        let response = command.map(|command| self.application.apply(&state, &mut batch, command)).transpose();
        let response = response.map_err(io_error)?;
        self.log.set_field_in(&mut batch, Field::Applied, &Applied::encode(state.generation, position));
        batch.commit().map_err(io_error)?;
        Ok(response)
    }

    /// The state at this moment, and its position if an entry was applied. Must not be called beside `install`.
    pub(crate) fn snapshot(&self) -> io::Result<(StateSnapshot, Option<Vec<u8>>)> {
        let (state, snapshot) = (self.current.current(), self.log.database().snapshot());
        let applied = self.log.field_in(&snapshot, Field::Applied).map_err(io_error)?;
        let applied = applied.map(|value| Applied::decode(&value)).transpose()?;
        assert!(applied.as_ref().is_none_or(|applied| applied.generation == state.generation));
        let position = applied.map(|applied| applied.position);
        let id = xxh3_64(position.as_deref().unwrap_or_default());
        Ok((StateSnapshot { snapshot, state, id }, position))
    }

    /// Empty partitions of a new generation, for a snapshot that is received.
    pub(crate) fn new_generation(&self) -> io::Result<ReceivedState> {
        let state = Some(self.open_generation(self.generations.fetch_add(1, Ordering::Relaxed) + 1)?);
        Ok(ReceivedState { database: self.log.database().clone(), generations: Arc::clone(&self.generations), state })
    }

    /// Switches to the partitions of a received snapshot, durably, and deletes the old ones.
    pub(crate) fn install(&self, mut received: ReceivedState, position: &[u8]) -> io::Result<()> {
        if !Arc::ptr_eq(&received.generations, &self.generations) {
            let why =
                format!("a snapshot that another node or group received was installed in group {}", self.log.group());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        // From here on the next open decides which partitions are deleted: a commit that fails may be durable.
        let Some(state) = received.state.take() else { return Err(io::Error::other("a snapshot without a state")) };
        let mut batch = self.log.database().batch();
        self.log.set_field_in(&mut batch, Field::Applied, &Applied::encode(state.generation, position));
        // A deletion of the old partitions could become durable before an unsynced commit.
        batch.durability(PersistMode::SyncData);
        batch.commit().map_err(io_error)?;
        let mut current = self.current.0.write().unwrap_or_else(PoisonError::into_inner);
        let old = std::mem::replace(&mut *current, Arc::new(state));
        drop(current);
        old.delete(self.log.database());
        Ok(())
    }
}

/// A state as it was at one moment.
#[derive(Clone, Debug)]
pub(crate) struct StateSnapshot {
    /// A hash of the position. States at the same position have the same content.
    pub(crate) id: u64,
    pub(crate) snapshot: Snapshot,
    pub(crate) state: Arc<State>,
}
