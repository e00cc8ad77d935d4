//! Tests of the tree on each persistence backend.
//!
//! Modules: [`fixture`] (a tree with its model), [`model`] (against a map), [`crash`], [`damage`], [`threads`],
//! [`range_deletes`], [`schedules`], [`seqno_schedules`] (concurrent writers), [`space`] (overhead of records).

mod crash;
mod damage;
mod fixture;
mod model;
mod range_deletes;
mod schedules;
mod seqno_schedules;
mod space;
mod threads;
