// The idempotent consumer as the articles about the inbox pattern have it, for Node.js: the message's
// id is inserted, the business tables are written and the transaction is committed; the offset follows.
// Generous in two ways: partitions are worked on at the same time, and statements are prepared by name.
'use strict';

const { Kafka, logLevel } = require('kafkajs');
const { Pool } = require('pg');

const { DATABASE_URL, BROKERS, TOPIC, GROUP } = process.env;
const partitions = Number(process.env.PARTITIONS);

const pool = new Pool({ connectionString: DATABASE_URL, max: partitions });
const kafka = new Kafka({ clientId: 'orders', brokers: BROKERS.split(','), logLevel: logLevel.WARN });
const consumer = kafka.consumer({ groupId: GROUP });

const claim = { name: 'claim', text: 'INSERT INTO processed (message_id) VALUES ($1) ON CONFLICT DO NOTHING' };
const insert = { name: 'insert', text: 'INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)' };
const update = { name: 'update', text: 'UPDATE account SET balance = balance + $2, n = n + 1 WHERE id = $1' };
const done = { name: 'done', text: 'UPDATE processed SET done = true WHERE message_id = $1' };

async function eachMessage({ message }) {
    const id = message.headers['message-id'].toString();
    const client = await pool.connect();
    try {
        await client.query('BEGIN');
        const claimed = await client.query({ ...claim, values: [id] });
        if (claimed.rowCount === 1) {
            const order = JSON.parse(message.value.toString());
            await client.query({ ...insert, values: [order.order_id, order.account, order.amount, order.note] });
            const updated = await client.query({ ...update, values: [order.account, order.amount] });
            if (updated.rowCount === 0) throw new Error(`no account ${order.account}`);
            await client.query({ ...done, values: [id] });
        }
        await client.query('COMMIT');
    } catch (error) {
        await client.query('ROLLBACK');
        throw error;
    } finally {
        client.release();
    }
}

async function main() {
    await consumer.connect();
    await consumer.subscribe({ topics: [TOPIC], fromBeginning: true });
    // As often as the others commit their offsets.
    await consumer.run({ eachMessage, partitionsConsumedConcurrently: partitions, autoCommitInterval: 500 });
}

main().catch((error) => {
    console.error(error);
    process.exit(1);
});
