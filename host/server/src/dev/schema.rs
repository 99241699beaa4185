//! The files with the handlers' tables. Each is a migration of the tenant, applied once: a new one
//! is applied, and one that changed is told, since the tables stay as they were made.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};

use super::TENANT;
use crate::cli::{Api, Migration, api_path, wire};

/// How often files are looked at. One that looks the same twice is not being written any more.
const POLL: Duration = Duration::from_secs(1);

/// The files, as their tables were made.
pub(super) struct Schema {
    /// How to make the tables anew, as a sentence's end.
    anew: String,
    files: Vec<SchemaFile>,
}

struct SchemaFile {
    path: PathBuf,
    /// SHA-256 of what was applied.
    applied: String,
    /// SHA-256 of what was looked at last, and of what was told last.
    seen: String,
    told: String,
}

/// The files, which must be there and readable.
pub(super) fn read(paths: &[PathBuf]) -> Result<Vec<Migration>> {
    paths.iter().map(|path| read_one(path)).collect()
}

fn read_one(path: &Path) -> Result<Migration> {
    Migration::read(path, &|path| std::fs::read(path))
}

impl Schema {
    /// Apply the files that were not applied before, and tell which changed since.
    pub(super) async fn apply(api: &Api, files: Vec<Migration>, anew: String) -> Result<Self> {
        let route = api_path(&["tenants", TENANT, "migrations"]);
        let known: Vec<wire::Migration> = api.get(&route).await?;
        let mut schema = Self { anew, files: Vec::new() };
        for file in files {
            let path = file.path.display();
            let applied = match known.iter().find(|known| known.name == file.name) {
                Some(known) => known.digest.clone(),
                None => {
                    let applied: wire::Migration = api
                        .post(&route, &file.to_send())
                        .await
                        .with_context(|| format!("`{path}`"))?;
                    println!("applied   {path}, which is new");
                    applied.digest
                }
            };
            let mut file =
                SchemaFile { told: applied.clone(), applied, seen: file.digest, path: file.path };
            file.tell(&schema.anew);
            schema.files.push(file);
        }
        Ok(schema)
    }

    /// Tell when a file changes, for ever.
    pub(super) async fn watch(mut self) {
        loop {
            tokio::time::sleep(POLL).await;
            for file in &mut self.files {
                // A file that is away for a moment is being written.
                if let Ok(now) = read_one(&file.path) {
                    let stands_still = file.seen == now.digest;
                    file.seen = now.digest;
                    if stands_still {
                        file.tell(&self.anew);
                    }
                }
            }
        }
    }
}

impl SchemaFile {
    /// Tell that it is not what the tables were made of, once for each text.
    fn tell(&mut self, anew: &str) {
        if self.seen == self.told {
            return;
        }
        self.told.clone_from(&self.seen);
        let path = self.path.display();
        if self.seen == self.applied {
            println!("schema    {path} is again what the tables were made of");
            return;
        }
        println!("schema    {path} has changed, and the tables stay as they were made");
        println!(
            "          to change them, write what is new into a file of its own: oncebox tenant \
                schema apply {TENANT} more.sql"
        );
        println!("          to make them anew, without their rows and messages: {anew}");
    }
}
