-- Stores a record with the token blocks that are new, and settles its intent.
-- KEYS[1]  rollout
-- ARGV[1]  incarnation of the attempt that the record belongs to
-- ARGV[2]  call
-- ARGV[3]  digest of the record's content
-- ARGV[4]  the encoded record
-- ARGV[5]  name of the block that the first of the new ones follows; 16 zero bytes for none
-- ARGV[6]  name of the record's last full block; 16 zero bytes for none
-- ARGV[7…] the new blocks, parents first: name, value
-- Reply    OK | SAME (stored already) | MISSING (the block of ARGV[5] is not stored; nothing changed) |
--          CONFLICT (other content, or refused: the rollout is now incomplete) | FROZEN |
--          RETIRED (also: another attempt, or no rollout)
-- Repeat   safe: SAME
local state, err = load_state()
if err then return err end
local call, digest, record, base, last = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local none = string.rep('\0', 16)

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
if base ~= none and redis.call('HEXISTS', key, 'b:' .. base) == 0 then return reply('MISSING', state) end

local names, bytes = {}, #record
for at = 7, #ARGV, 2 do
  if redis.call('HSETNX', key, 'b:' .. ARGV[at], ARGV[at + 1]) == 1 then
    names[#names + 1] = ARGV[at]
    bytes = bytes + #ARGV[at + 1]
  end
end
-- The newest three ends of chains: this one instead of the one it goes on from.
local ends = {}
for at = 1, #state.ends, 16 do
  local kept = string.sub(state.ends, at, at + 15)
  if kept ~= last and kept ~= base then ends[#ends + 1] = kept end
end
if last ~= none then ends[#ends + 1] = last end
if #ends > 3 then table.remove(ends, 1) end

if known[3] then
  redis.call('HDEL', key, 'n:' .. call)
  state.intents = state.intents - 1
end
state.seq = state.seq + 1
state.version = state.version + 1
redis.call('HSET', key, 'o:' .. state.seq, #names .. ':' .. table.concat(names) .. 'r:' .. call,
  'i:' .. call, digest, 'r:' .. call, record, 's:seq', state.seq, 's:version', state.version,
  's:records', state.records + 1, 's:intents', state.intents, 's:blocks', state.blocks + #names,
  's:bytes', state.bytes + bytes, 's:ends', table.concat(ends))
return reply('OK', state)
