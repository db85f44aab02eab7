-- Stores a record and settles its intent.
-- KEYS[1]  rollout
-- ARGV[1]  incarnation of the attempt that the record belongs to
-- ARGV[2]  call
-- ARGV[3]  digest of the record's content
-- ARGV[4]  the encoded record
-- Reply    OK | SAME (stored already) | CONFLICT (other content, or refused: the rollout is now
--          incomplete) | FROZEN | RETIRED (also: another attempt, or no rollout)
-- Repeat   safe: SAME
local state, err = load_state()
if err then return err end
local call, digest, record = ARGV[2], ARGV[3], ARGV[4]
if not state or state.incarnation ~= ARGV[1] or state.status == 'retired' then
  return reply('RETIRED', state)
end
local known = redis.call('HMGET', key, 'i:' .. call, 'x:' .. call, 'n:' .. call)
if known[1] == digest then return reply('SAME', state) end
if state.status == 'frozen' then return reply('FROZEN', state) end
if known[1] or known[2] then
  mark_failure(state, call, 'conflict')
  return reply('CONFLICT', state)
end
if known[3] then
  redis.call('HDEL', key, 'n:' .. call)
  state.intents = state.intents - 1
end
state.seq = state.seq + 1
state.version = state.version + 1
redis.call('HSET', key, 'o:' .. state.seq, 'r:' .. call, 'i:' .. call, digest, 'r:' .. call, record,
  's:seq', state.seq, 's:version', state.version, 's:records', state.records + 1,
  's:intents', state.intents, 's:bytes', state.bytes + #record)
return reply('OK', state)
