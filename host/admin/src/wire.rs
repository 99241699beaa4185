//! What the API's bodies hold, for those who speak to it.

pub use crate::{
    audit::AuditEntry,
    consumers::{Consumer, NewConsumer},
    error::{Code, Problem, ProblemDetails},
    hosts::Host,
    inbox::{InboxMessage, InboxRecord, InboxRow},
    migrations::{Migration, NewMigration},
    tenants::{NewTenant, Tenant},
    tokens::{NewToken, Role, Token, TokenCreated},
    whoami::Whoami,
};
